"""Numbers -> text and pages. Renderers compute nothing but widths."""

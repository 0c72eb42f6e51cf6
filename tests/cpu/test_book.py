"""The recorder's book: values that move from one storage to another."""

import torch

from lowtide._trace.book import Book


def test_a_value_that_moves_is_still_the_same_and_known_by_where_it_belongs() -> None:
    tensor = torch.zeros(1000)
    book = Book()
    book.admit_existing()
    value = book.shown(tensor)
    book.belongs(tensor, 4000, torch.device("cuda", 0), shown=True, away=True)
    for _ in range(2):
        moved = torch.zeros(1000)
        book.move(tensor, moved.untyped_storage())
        tensor.data = moved
        del moved
        assert book.current(tensor) == value
    entry = book.entries[value]
    assert (entry.device, entry.bytes, entry.away, entry.end) == ("cuda:0", 4000, True, None)
    tensor.add_(1)  # unseen: another version, in the same storage
    assert book.current(tensor) != value
    assert book.entries[book.current(tensor)].storage == entry.storage
    del tensor
    assert book.entries[-1].end is not None


def test_of_several_tensors_in_one_place_the_one_that_is_written_to_counts() -> None:
    """Which of them is found first is chance."""
    tensor = torch.zeros(1000)
    for _ in range(3):
        tensor.add_(1)
    also = torch.empty(0).set_(tensor.untyped_storage(), 0, tensor.size(), tensor.stride())
    book = Book()
    value = book.shown(also)
    book.belongs(tensor, 4000, torch.device("cpu"), shown=False, away=False)
    assert book.current(tensor) == value
    assert not book.entries[value].away

"""Trace, machine, budget -> Plan: which values leave the device, when, and when they return."""

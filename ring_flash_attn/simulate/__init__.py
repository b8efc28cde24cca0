"""Simulation: how long schedules take on machines, priced by measured kernel rates; no torch."""

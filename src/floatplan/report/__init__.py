"""SHOWING IT: run folders, tables and pages. Needs no torch."""

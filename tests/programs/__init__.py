"""Random programs, run by the engine and by a second implementation in float64."""

"""The page of a report: curves, marks, goodput and configs of runs in one HTML file."""

"""What a run tells: metrics on disk, trackers, a progress line, sample grids and the report. Knows no trainer."""

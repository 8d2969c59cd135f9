"""What every model family must keep, shown on tiny random weights."""

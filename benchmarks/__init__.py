"""Where the figures of the README come from: `make bench`."""

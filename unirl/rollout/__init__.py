"""Engines that fill request Samples."""

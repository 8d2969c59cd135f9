"""Prompts and records, with exact resume."""

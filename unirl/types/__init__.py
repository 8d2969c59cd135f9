"""Values that flow between the stages of a run. Depends on torch and the standard library only."""

"""Run a function on P processes: launch them, supervise them, gather the results, clean up."""

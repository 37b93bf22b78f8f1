"""From a function to P processes and back: launch, supervise, gather, end whole."""

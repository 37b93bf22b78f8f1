"""What notebook cells use besides figures: predictions, and the library's source."""

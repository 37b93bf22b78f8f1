"""The exercises, a file per set; ``workbook.check`` is their face, ``grader`` what they share."""

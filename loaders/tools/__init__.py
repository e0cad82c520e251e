"""Looking at data and streams before and beside training.

`verify` (verify.py), `compare` (compare.py), `plan` (planning.py), `write_report` (report.py); the
results of a pass: `Collect` (results.py).
"""

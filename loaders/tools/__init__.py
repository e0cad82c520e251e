"""Looking at data and streams before and beside training.

`verify` (verify.py), `compare` (compare.py), `plan` (planning.py) and `write_report` (report.py).
"""

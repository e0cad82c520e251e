"""Checks of data and streams, before and during training.

`verify` (verify.py), `overlap` (overlap.py), `compare` (compare.py) over the backends of
backends.py, `plan` (planning.py); the results of a pass: `Results` (results.py); `who`, `when` and
`diff` (who.py).
"""

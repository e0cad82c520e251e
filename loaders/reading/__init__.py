"""Reading by id: reader.py gives fields, fetch.py their bytes through few open files (handles.py).

side_table.py joins memory-mapped arrays by sample id.
"""

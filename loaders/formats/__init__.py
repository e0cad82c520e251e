"""The bytes of each container: where a record and each of its fields lies, and how to write them.

TFRecord files: tfrecord.py frames, example.py reads `tf.train.Example` (wire.py and features.py
are protobuf's part of it). Tar files: tar.py, with the headers in tarheader.py. Loose files:
files.py. Each scans a shard into `Record`s (records.py), checks all it meets (checksum.py), and
refuses what is no shard (opening.py, sniff.py). interop.py knows the indexes of others.
"""

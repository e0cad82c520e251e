"""The bytes of each container: where a record and each of its fields lies, and how to write them.

- TFRecord files: tfrecord.py has the framing. example.py reads `tf.train.Example`, for which
  _protobuf.py and features.py read protobuf; _chunk_features.py reads many Examples at once.
- Tar files: tar.py, with the headers in _tarheader.py and _tarnumbers.py, the keys in _tarkeys.py.
  _chunk_samples.py reads many plain headers at once.
- Loose files: files.py.

Each scans a shard into `Record`s, or chunks of these (records.py), and refuses what is not a shard
(sniff.py).
"""

from twinfeed.loaders.formats.files import Entry
from twinfeed.loaders.formats.tar import TarWriter
from twinfeed.loaders.formats.tfrecord import TFRecordWriter

__all__ = ["Entry", "TFRecordWriter", "TarWriter"]

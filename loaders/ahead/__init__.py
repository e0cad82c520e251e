"""What is ahead in a stream: the ranges that it needs, and the step that needs each of them last.

- schedule.py has what a stream draws, and spans.py which spans the stream enters and leaves.
- ranges.py says what is read in one piece. planner.py requests the ranges of coming batches.
- fetcher.py is what fetches bytes. held.py keeps remote ranges until the stream has passed them.
- chunks.py reads remote shards through a disk cache. uses.py knows when each chunk is used next.
"""

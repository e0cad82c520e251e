"""Examine anybody's sampler: what it draws, and where it contradicts itself or what it promises.

`audit` (examination.py) has its arguments checked (promises.py), and draws the epochs of all ranks
(worlds.py) by a `Maker` (maker.py), which builds the user's object as a rank, in the surroundings
of isolation.py, or in processes (rank_processes.py). A `Pass` (streams.py) is what one pass gave.
Then it asks questions, functions of the `Evidence` (evidence.py): of every stream
(stream_questions.py), of chance (chance_questions.py), of resuming (resume_questions.py), of
classes and mixing (mixing_questions.py), and of cost (cost_questions.py). The answers are an
`Audit` (report.py).
"""

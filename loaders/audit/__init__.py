"""Examine anybody's sampler: what it draws, and where it contradicts itself or what it promises.

`audit` (examination.py) has its arguments checked (declared.py). In a process that is ended if it
hangs (processes.py), or in this one, a `Maker` (drawing.py) builds the user's object as a rank, in
the surroundings of isolation.py, and draws from it. A `World` (worlds.py) has the streams of all
ranks, for one number of ranks. A table of questions says of which worlds each is asked, and what it
needs. The questions are functions of a world: of what came (stream_questions.py), of what comes
when it is drawn again (repeat_questions.py), and after a restart (resume_questions.py). The answers
are an `Audit` (report.py).
"""

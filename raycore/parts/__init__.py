"""What an engine can do besides generating text from text, each capability in a folder of its own: a *room*.

A room has a module or a package for each side that the capability has. Sides have the names of layers, and are in them:
`parts/adapters/scheduler.py` may import what `raycore/scheduler` may, and is imported by what may import that. What all
sides of a room share and needs no layer is in its `values.py`. The layers compose parts by contracts (`SchedulerPart`,
`EnginePart`, `WorkerPart`, `RunnerPart`): a room is named in the lists that make these, and nowhere else in a hub.
"""

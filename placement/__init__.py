"""Where a group of processes goes on a Ray cluster: read the topology, plan purely, reserve.

A package of its own: it imports Ray and the standard library, never raycore. `topology` reads the cluster into a
`ClusterView`, `plan` turns a view and a shape into rank plans without touching anything, and only `reserve` acts.
"""

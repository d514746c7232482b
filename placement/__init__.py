"""Places ranks, which are groups of processes, on the nodes of a Ray cluster.

This package imports Ray and the standard library, but never raycore. `topology` reads the cluster into a `ClusterView`.
`plan` assigns the ranks of an `EngineShape` to the nodes of that view, and is pure. Only `reserve` changes the cluster.
"""

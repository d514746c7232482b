"""Placement of groups of processes on a Ray cluster: read the topology, plan, reserve.

An independent package: it imports Ray and the standard library, never raycore. `topology` reads the cluster into a
`ClusterView`, `plan` is pure and turns a view and a shape into rank plans, and only `reserve` changes the cluster.
"""

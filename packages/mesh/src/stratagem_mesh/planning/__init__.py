"""Sizes of a mesh by plan: memory, time, and the reason of each choice.

A few steps are simulated, of the model alone and with two ranks along each axis. What a rank holds
and sends with any other sizes follows from them by formulas (`profile`, `time`), so that the
hundreds of meshes of 1,024 devices take a second. The planner simulates the chosen ones.
"""

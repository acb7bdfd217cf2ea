"""Worlds that run the operators of a program: a rank over a process group, or all in one."""

"""Reads what users give: files and numbers, with limits, and an error in one line for anything else.

May import ``errors``.
"""

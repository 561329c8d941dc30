"""Runs of many steps: one that prunes, one within a budget of loss, and a sweep of many recipes.

May use every room up to `evaluation`.
"""

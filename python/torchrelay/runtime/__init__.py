"""Carries plans out on torch. Knows the plans, and nothing of the wrappers that put a plan and a runtime together."""

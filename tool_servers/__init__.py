"""Servers that offer tools over HTTP to many machines. They need the extra ``servers``; no other package imports this one."""

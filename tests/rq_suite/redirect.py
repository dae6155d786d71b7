"""Reaches RQ_SUITE_SOCKET wherever RQ's tests name localhost; each interpreter of a run imports it at its start."""

import os
import socket

import redis.connection


def _connect(self: redis.connection.Connection) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(self.socket_connect_timeout)
    connection.connect(os.environ["RQ_SUITE_SOCKET"])
    connection.settimeout(self.socket_timeout)
    return connection


redis.connection.Connection._connect = _connect

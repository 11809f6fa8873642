"""Reserve TCP ports for tests that run at the same time, in this process or in other ones."""

import socket

_PORTS = range(12_000, 32_000)  # below the ports that Linux picks for outgoing connections, such as gloo's
_reservations: dict[int, socket.socket] = {}


def free_port() -> int:
    """Return a port that nobody listens on, and that no process gets from this function while this process lives.

    To bind a port and to close it again would not be enough: between that and its use by a rank, another test could
    get the same port.

    Raises:
        OSError: all ports are taken.
    """
    for port in _PORTS:
        if port in _reservations:
            continue
        reservation = socket.socket(socket.AF_UNIX)
        try:
            # an abstract name (it begins with a zero byte) belongs to one process, and disappears with that process
            reservation.bind(f"\0fabric-train-tests-port-{port}")
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            reservation.close()
            continue
        _reservations[port] = reservation
        return port
    raise OSError(f"no port is free in {_PORTS}")

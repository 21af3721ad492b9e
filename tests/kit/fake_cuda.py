"""A stand-in for ``torch.cuda`` that says what it was asked, in which order."""

from unittest import mock


class Cuda:
    """Stands for ``torch.cuda``: notes what is asked, and does nothing."""

    def __init__(self):
        self.asked = []
        self.current = self.Stream("current")

    def __call__(self, *words):
        self.asked.append(" ".join(map(str, words)))

    def Stream(self, device):  # noqa: N802
        stream = mock.MagicMock()
        stream.number = len(self.asked)
        name = device if device == "current" else f"stream{sum('new' in a for a in self.asked)}"
        if device != "current":
            self("new", name)
        stream.name = name
        stream.wait_stream = lambda other: self(name, "behind", other.name)
        stream.wait_event = lambda event: self(name, "after", event.of)
        return stream

    def is_available(self):
        return True

    def Event(self):  # noqa: N802
        event = mock.MagicMock()

        def record(stream):
            event.of = f"event of {stream.name}"
            self("record", event.of)

        event.record = record
        event.synchronize = lambda: self("host after", event.of)
        return event

    def current_stream(self, device):
        return self.current

    def stream(self, stream):
        return mock.MagicMock()

from lab import LinkBytes, Tree, Wiring, by_level, counters, difference

WIRING = Wiring(lab="zmlab-1-0", tree=Tree.parse("2@200mbit,1@1gbit,1"))


def row(interface, *, received, sent):
    return {
        "ifname": interface,
        "stats64": {"rx": {"bytes": received, "packets": received // 100}, "tx": {"bytes": sent, "packets": 0}},
    }


def test_what_the_upper_end_receives_was_sent_from_below():
    printed = {
        (): [row("lo", received=7, sent=7), row("port0", received=500, sent=40), row("port1", received=0, sent=2)],
        (0,): [row("eth0", received=40, sent=500), row("port0", received=501, sent=41)],
        (1,): [row("port0", received=3, sent=4)],
    }
    read = counters.parse(WIRING.tree.links, printed)
    assert {name: (link.sent_bytes, link.received_bytes) for name, link in read.items()} == {
        "0": (500, 40),
        "1": (0, 2),
        "0.0": (501, 41),
        "1.0": (3, 4),
    }
    assert read["0"].sent_packets == 5
    assert [level.sent_bytes for level in by_level(WIRING, read)] == [500, 504]
    assert [level.sent_payload_bytes for level in by_level(WIRING, read)] == [500 - 5 * 66, 504 - 5 * 66]


def test_counts_are_read_once_for_each_switch():
    assert [command.argv[2] for command in counters.read_commands(WIRING).values()] == [
        "zmlab-1-0-root",
        "zmlab-1-0-0",
        "zmlab-1-0-1",
    ]


def test_a_difference_is_taken_link_by_link():
    before = {"0": LinkBytes(sent_bytes=1, received_bytes=2, sent_packets=3, received_packets=4)}
    after = {"0": LinkBytes(sent_bytes=11, received_bytes=22, sent_packets=33, received_packets=44)}
    spent = difference(after, before)
    assert spent == {"0": LinkBytes(sent_bytes=10, received_bytes=20, sent_packets=30, received_packets=40)}
    assert spent["0"] + before["0"] == after["0"]

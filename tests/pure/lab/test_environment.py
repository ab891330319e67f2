from lab import Tree, Wiring
from lab.environment import environment


def of_rank(rank, text="2@200mbit,2@1gbit,2", around=()):
    plan = Wiring(lab="zmlab-1-0", tree=Tree.parse(text))
    return environment(plan, plan.tree.places[rank], port=29501, around=dict(around))


def test_a_rank_sees_what_torchrun_would_tell_it():
    assert of_rank(5) == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "2",
        "GROUP_WORLD_SIZE": "4",
        "NODE_RANK": "2",
        "ROLE_RANK": "5",
        "ROLE_WORLD_SIZE": "8",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "10.77.0.1",
        "MASTER_PORT": "29501",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "eth0",
        "TP_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "ZEROMESH_LAB": "zmlab-1-0",
        "ZEROMESH_LAB_TREE": "2@200mbit,2@1gbit,2",
        "ZEROMESH_LAB_ADDRESS": "10.77.0.3",
    }


def test_the_owners_environment_is_passed_on_and_another_torchruns_is_not():
    around = {"HOME": "/root", "OMP_NUM_THREADS": "4", "RANK": "9", "TORCHELASTIC_RUN_ID": "x"}
    env = of_rank(0, around=around.items())
    assert (env["HOME"], env["OMP_NUM_THREADS"], env["RANK"]) == ("/root", "4", "0")
    assert "TORCHELASTIC_RUN_ID" not in env


def test_one_leaf_without_links_meets_on_loopback():
    env = of_rank(1, "4")
    assert (env["MASTER_ADDR"], env["GLOO_SOCKET_IFNAME"], env["LOCAL_RANK"]) == ("127.0.0.1", "lo", "1")

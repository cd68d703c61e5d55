"""Ray's side of the cloud of namespace hosts: what `provider: {type: external, module: …}` names in a cluster file.

It runs at the laptop and in the head's container, so it needs Ray alone.
"""

import json
import urllib.request
from typing import Any

from ray.autoscaler.node_provider import NodeProvider


class NamespaceProvider(NodeProvider):
    """Makes and ends nodes by asking the cloud at `provider.url`."""

    def _call(self, name: str, **arguments: Any) -> Any:
        request = urllib.request.Request(self.provider_config["url"], json.dumps([name, arguments]).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def non_terminated_nodes(self, tag_filters: dict[str, str]) -> list[str]:
        nodes = self._call("nodes")
        return [node for node, found in nodes.items() if tag_filters.items() <= found["tags"].items()]

    def is_running(self, node_id: str) -> bool:
        return node_id in self._call("nodes")

    def is_terminated(self, node_id: str) -> bool:
        return not self.is_running(node_id)

    def node_tags(self, node_id: str) -> dict[str, str]:
        return self._call("nodes").get(node_id, {}).get("tags", {})

    def external_ip(self, node_id: str) -> str | None:
        return self._call("nodes").get(node_id, {}).get("address")

    internal_ip = external_ip

    def create_node(self, node_config: dict[str, Any], tags: dict[str, str], count: int) -> None:
        self._call("create", tags=tags, count=count)

    def set_node_tags(self, node_id: str, tags: dict[str, str]) -> None:
        self._call("tag", node=node_id, tags=tags)

    def terminate_node(self, node_id: str) -> None:
        self._call("terminate", node=node_id)

    @staticmethod
    def bootstrap_config(cluster_config: dict[str, Any]) -> dict[str, Any]:
        """A key pair, as Ray makes one for other clouds."""
        auth = {**cluster_config["auth"], "ssh_private_key": cluster_config["provider"]["key"]}
        return {**cluster_config, "auth": auth}

"""The accounts of the stand-in for the hub: what whoami answers for a token, and what the token may do."""

from collections.abc import Mapping
from typing import Any

Account = dict[str, Any]
"""What whoami answers for a token."""


def account(
    name: str, role: str = "write", orgs: Mapping[str, str] | None = None, scopes: Mapping[str, list[str]] | None = None
) -> Account:
    """Return what whoami answers for a token.

    Args:
        name: of the account.
        role: of the token: read, write or fineGrained.
        orgs: role of the account in each organization.
        scopes: permissions of a fine-grained token by account, organization or repository.
    """
    token: dict[str, Any] = {"displayName": f"token-of-{name}", "role": role}
    if scopes is not None:
        scoped = [{"entity": {"name": entity}, "permissions": permissions} for entity, permissions in scopes.items()]
        token["fineGrained"] = {"global": [], "scoped": scoped}
    return {
        "type": "user",
        "name": name,
        "orgs": [{"type": "org", "name": org, "roleInOrg": org_role} for org, org_role in (orgs or {}).items()],
        "auth": {"type": "access_token", "accessToken": token},
    }


def may_see(caller: Account, owner: str) -> bool:
    """Return whether an account may see the private repositories of an owner."""
    return owner == caller["name"] or owner in [org["name"] for org in caller["orgs"]]


def may_write(caller: Account, repository: str) -> bool:
    """Return whether a token may write to the repository OWNER/NAME, by the account's roles and the token's scopes."""
    owner = repository.split("/")[0]
    token = caller["auth"]["accessToken"]
    role_by_owner = {caller["name"]: "admin"}
    for org in caller["orgs"]:
        role_by_owner[org["name"]] = org["roleInOrg"]
    if token["role"] == "read" or role_by_owner.get(owner, "read") == "read":
        return False
    if token["role"] == "write":
        return True
    permissions: set[str] = set()
    for scope in token["fineGrained"]["scoped"]:
        if scope["entity"]["name"] in (owner, repository):
            permissions.update(scope["permissions"])
    return "repo.write" in permissions or "repo.content.write" in permissions

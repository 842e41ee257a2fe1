package connector

import "strings"

// tenantMark begins every salt that TenantSalt makes.
const tenantMark = "kvport-tenant:"

// TenantSalt is the salt of a tenant's request whose client gave a salt of its own, or an empty one. No two pairs have
// the same: a tenant's name has no colon.
func TenantSalt(tenant, salt string) string { return tenantMark + tenant + ":" + salt }

// TenantOf is the tenant of a salt that TenantSalt made; empty for any other salt.
func TenantOf(salt string) string {
	rest, is := strings.CutPrefix(salt, tenantMark)
	tenant, _, whole := strings.Cut(rest, ":")
	if !is || !whole {
		return ""
	}
	return tenant
}

// IsTenantSalt reports whether a salt has the form of those that TenantSalt makes, whatever follows: such a salt may only
// come from a client that is trusted to name tenants.
func IsTenantSalt(salt string) bool { return strings.HasPrefix(salt, tenantMark) }

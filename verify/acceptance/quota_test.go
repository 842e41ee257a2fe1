package acceptance

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host"
	"github.com/kvport/kvport/verify/fixture"
)

// quotaCase is a connector with room for a few blocks only.
type quotaCase struct {
	name, connector string
	room            int // blocks of a tenant, or of all, that are stored for sure
	extra           func(b backend) string
	before          func(t *testing.T, b backend)
	says            []string // what the error tells: how much there is, and of what
	metric          string   // that counts it
	declined        bool     // it happens because the config asks for it
}

func quotaCases() []quotaCase {
	const block = 16*32*2 + 2*16 // two layers and their digests, as openKeys has them
	room := int64(8 * (block + 512))
	tiers := func(b backend) string {
		return fmt.Sprintf(`{"cpu_bytes_to_use":134217728,"tenant_bytes":%d,"disk_path":"%s/disk","disk_bytes":134217728,"disk_admit_after":1}`, room, b.dir)
	}
	remote := func(b backend) string { return fmt.Sprintf(`{"url":"redis://%s"}`, b.server) }
	full := func(t *testing.T, b backend) {
		require.NoError(t, b.redis.Do(t.Context(), "config", "set", "maxmemory", "1", "maxmemory-policy", "noeviction"))
	}
	return []quotaCase{
		{
			name: "tenant_bytes of OffloadingConnector", connector: "OffloadingConnector", room: 8, extra: tiers, declined: true,
			says: []string{"tenant", fmt.Sprintf("of %d bytes", room), "over quota"}, metric: "kvport_connector_declined_quota_total",
		},
		{
			name: "maxmemory of RemoteStoreConnector's server", connector: "RemoteStoreConnector", extra: remote, before: full,
			says: []string{"127.0.0.1:", "server has no memory left"}, metric: "kvport_transfer_failed_blocks_total",
		},
	}
}

// TestQuotaOverflow: who saves beyond what a config or a server permits is told which blocks were not stored and why, by
// the event of the save and by a metric; what was stored stays, and other tenants go on.
func TestQuotaOverflow(t *testing.T) {
	if testing.Short() {
		t.Skip("starts plugins and a server: left out with -short, which the race stage uses")
	}
	b := newBackend(t)
	for _, c := range quotaCases() {
		t.Run(c.name, func(t *testing.T) { c.run(t, b.under(t, c.connector)) })
	}
}

func (c *quotaCase) run(t *testing.T, b backend) {
	f := scene{name: c.connector, Fixture: &fixture.Fixture{}, Setup: fixture.Setup{Config: json.RawMessage(c.extra(b))}}
	i := usual()
	e, err := openKeys(t, &f, b, i, "engine")
	require.NoError(t, err)
	if c.before != nil {
		c.before(t, b)
	}
	stored, failed := 0, 0
	var last error
	for n := range 8 {
		space := i.space
		space.Multimodal = []string{fmt.Sprint("prompt ", n)}
		saved := e.save(fmt.Sprint("request ", n), space.Keys(make([]int32, keyPrompt), i.block), 1)
		failed += len(saved.Failed)
		stored += keyPrompt/i.block - len(saved.Failed)
		if len(saved.Failed) > 0 {
			last = saved.Err
		}
	}
	require.GreaterOrEqual(t, stored, c.room)
	require.Positive(t, failed, "blocks that were not stored")
	require.Error(t, last)
	for _, part := range c.says {
		require.ErrorContains(t, last, part)
	}
	if c.declined {
		require.ErrorIs(t, last, connector.ErrDeclined)
	}
	e.settled(c.metric, failed)
	t.Logf("%d blocks stored, %d refused, told by the event: %v; counted by %s", stored, failed, last, c.metric)
	if c.declined { // another tenant has its own
		i.space.Salt = "another"
		saved := e.save("another tenant's", i.space.Keys(make([]int32, keyPrompt), i.block), 2)
		require.Empty(t, saved.Failed, "%v", saved.Err)
	}
}

// save saves a prompt's blocks for a tenant and returns the event that reports it.
func (e *keyEngine) save(id string, keys []connector.BlockKey, tenant uint64) host.Event {
	e.Helper()
	t := e.transfer(id, keys, 1)
	t.Tenant = tenant
	e.each(t.Blocks, func(span, want []byte) { copy(span, want) })
	q := connector.Query{Request: t.Request, Tokens: t.Tokens + 1, Keys: keys}
	e.send(&connector.Step{Arrived: []connector.Query{q}, Computed: []connector.Transfer{t}})
	saved := e.next(host.Saved, t.Request)
	e.send(&connector.Step{Ended: []connector.Ended{{Request: t.Request, Reason: connector.ReasonLength, Tokens: t.Tokens}}})
	e.next(host.Finished, t.Request)
	return saved
}

// settled waits until a metric, which the plugin is asked for, reaches a count.
func (e *keyEngine) settled(metric string, count int) {
	e.Helper()
	require.Eventually(e, func() bool { return int(e.counter(metric)) >= count }, time.Minute, 100*time.Millisecond, "%s, want %d", strings.TrimSpace(metric), count)
}

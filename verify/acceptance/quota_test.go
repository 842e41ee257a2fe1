package acceptance

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/host"
	"github.com/kvport/kvport/verify/fixture"

	"github.com/kvport/kvport/verify/acceptance/rig"
)

// TestQuotaOverflow: who saves beyond what a config or a server permits is told which blocks were not stored and why, by
// the event of the save and by a metric; what was stored stays, and other tenants go on.
func TestQuotaOverflow(t *testing.T) {
	if testing.Short() {
		t.Skip("starts plugins and a server: left out with -short, which the race stage uses")
	}
	b := newBackend(t)
	for _, f := range rig.Connectors(t, func(f *fixture.Fixture) bool { return f.Quota != nil }) {
		t.Run(f.Connector, func(t *testing.T) { quotaOverflow(t, f, b.under(t, f.Connector)) })
	}
}

func quotaOverflow(t *testing.T, f *fixture.Fixture, b backend) {
	const block = 16*32*2 + 2*16 // two layers and their digests, as openKeys has them
	c, room := f.Quota, fmt.Sprint(f.Quota.Room*(block+512))
	s := scene{name: f.Connector, Fixture: &fixture.Fixture{}, Setup: fixture.Setup{Config: bytes.ReplaceAll(c.Config, []byte(`"@ROOM@"`), []byte(room))}}
	i := usual()
	e, err := openKeys(t, &s, b, i, "engine")
	require.NoError(t, err)
	if c.ServerFull {
		require.NoError(t, b.redis.Do(t.Context(), "config", "set", "maxmemory", "1", "maxmemory-policy", "noeviction"))
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
	require.GreaterOrEqual(t, stored, c.Room)
	require.Positive(t, failed, "blocks that were not stored")
	require.Error(t, last)
	for _, part := range c.Says {
		require.ErrorContains(t, last, strings.ReplaceAll(part, "@ROOM@", room))
	}
	if c.Declined {
		require.ErrorIs(t, last, connector.ErrDeclined)
	}
	e.settled(c.Metric, failed)
	t.Logf("%d blocks stored, %d refused, told by the event: %v; counted by %s", stored, failed, last, c.Metric)
	if c.Declined { // another tenant has its own
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

package router

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/engine/kvevents"
	"github.com/kvport/kvport/engine/router/policy"
	"github.com/kvport/kvport/internal/register"
)

// newTestCore makes a Core whose time is *now.
func newTestCore(t *testing.T, name string, now *time.Time) *Core {
	t.Helper()
	c, err := NewCore(CoreConfig{Policy: policy.Config{Policy: name}, Now: func() time.Time { return *now }})
	require.NoError(t, err)
	return c
}

// join registers an instance as an engine does, the second time with the nonce of the first answer.
func join(t *testing.T, c *Core, part, address string) *register.Message {
	t.Helper()
	m := &register.Message{Type: part, HTTP: address, Nonce: register.NoNonce}
	require.ErrorIs(t, announce(t, c, m), errNonce)
	require.NoError(t, announce(t, c, m))
	return m
}

// announce registers an instance, and keeps the nonce of the answer.
func announce(t *testing.T, c *Core, m *register.Message) (err error) {
	t.Helper()
	body, err := json.Marshal(m)
	require.NoError(t, err)
	m.Nonce, err = c.Register(body)
	return err
}

// at is the place of an instance.
func (c *Core) at(m *register.Message) int {
	return c.Place(map[string]policy.Role{"P": policy.Prefill, "D": policy.Decode}[m.Type], m.HTTP)
}

// A Core keeps instances for as long as their registrations are good, by the time that it is given.
func TestCoreForgets(t *testing.T) {
	now := time.Unix(1e9, 0)
	c := newTestCore(t, policy.RoundRobin, &now)
	p, d := join(t, c, "P", "a:1"), join(t, c, "D", "b:1")
	require.Equal(t, 2, c.Instances())
	now = now.Add(registrationTTL - time.Second)
	require.NoError(t, announce(t, c, d))
	c.Sweep()
	require.Equal(t, 2, c.Instances())
	now = now.Add(time.Second)
	c.Sweep()
	require.Equal(t, 1, c.Instances())
	require.Equal(t, policy.None, c.at(p))
	require.GreaterOrEqual(t, c.at(d), 0)
	require.ErrorContains(t, announce(t, c, &register.Message{Type: "x"}), "want P or D")
	_, err := c.Register([]byte("{"))
	require.Error(t, err)
}

// What fails or refuses is not chosen again, and nothing counts that has ended.
func TestCoreChooses(t *testing.T) {
	now := time.Unix(1e9, 0)
	c := newTestCore(t, policy.LeastLoaded, &now)
	first, other, d := join(t, c, "P", "a:1"), join(t, c, "P", "b:1"), join(t, c, "D", "c:1")
	tried := map[int]bool{}
	ask := &policy.Request{Tokens: 100}
	prefill, decode, ok := c.Choose(ask, tried, policy.None)
	require.True(t, ok)
	require.Equal(t, c.at(d), decode.Place())
	require.Equal(t, 100, prefill.Leg().Compute)
	c.Sent(prefill)
	c.Failed(prefill)
	c.Done(prefill)
	second := c.ChoosePrefill(ask, decode, tried)
	require.ElementsMatch(t, []int{c.at(first), c.at(other)}, []int{prefill.Place(), second.Place()})
	require.Nil(t, c.ChoosePrefill(ask, decode, tried))
	c.Unaided(decode)
	c.Answered(second, policy.Usage{Prompt: 100})
	c.Worked(second)
	c.Done(second)
	c.Done(decode)
	c.Leave([]int{prefill.Place(), second.Place(), decode.Place()})
	for place := range 3 {
		running, waiting := c.Busy(place)
		require.Zero(t, running)
		require.Zero(t, waiting)
	}
	c.Probed(c.at(d), 0, false, true)
	_, _, ok = c.Choose(ask, map[int]bool{}, policy.None)
	require.False(t, ok)
	c.Probed(c.at(d), 0, true, false)
	_, _, ok = c.Choose(ask, map[int]bool{}, policy.None)
	require.True(t, ok)
}

// A Core knows what instances hold by their KV events, until they leave.
func TestCoreFollows(t *testing.T) {
	now := time.Unix(1e9, 0)
	c := newTestCore(t, policy.PrefixAware, &now)
	d := join(t, c, "D", "a:1")
	place := c.at(d)
	require.Nil(t, c.Held([]int32{1}), "nobody is followed")
	sink, begun := c.Follow(place)
	require.True(t, begun)
	_, begun = c.Follow(place)
	require.False(t, begun)
	sink.From(0)
	sink.Apply([]kvevents.Event{{Kind: kvevents.Stored, Hashes: []kvevents.Hash{kvevents.NumberHash(1)}, Tokens: []int32{1, 2, 3, 4}, BlockSize: 4}})
	require.Equal(t, []policy.Held{{Place: place, Hit: policy.Hit{Engine: 4, Node: 4, Shared: 4}}}, c.Held([]int32{1, 2, 3, 4, 5}))
	require.Equal(t, []policy.Held{{Place: place}}, c.Held([]int32{1, 2, 3, 4}), "the last token is always computed")
	require.Equal(t, 1, c.Indexed(place))
	blocks, bytes := c.Index()
	require.Equal(t, 1, blocks)
	require.Positive(t, bytes)
	c.Probed(place, 0, true, false)
	require.Equal(t, 1, c.Indexed(place), "a health check changes nothing")
	now = now.Add(registrationTTL)
	c.Sweep()
	blocks, _ = c.Index()
	require.Zero(t, blocks)
	require.Zero(t, c.Indexed(place))
	sink, _ = c.Follow(place)
	require.Nil(t, sink)

	sink, _ = newTestCore(t, policy.RoundRobin, &now).Follow(0)
	require.Nil(t, sink, "nobody asks")
}

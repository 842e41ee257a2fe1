package peer

import (
	"bytes"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe"
)

func TestMessages(t *testing.T) {
	for _, m := range []*message{
		{kind: kindWant, keys: []connector.StoreKey{{1}, {2}}},
		{kind: kindGone, keys: []connector.StoreKey{{3}}},
		{kind: kindFetched, hold: 7},
		{kind: kindPushed, hold: 8, from: "host:2"},
		{kind: kindSubscribe},
		{kind: kindSubscribe, from: "host:3"},
	} {
		header, payload := m.encode()
		got, err := parseMessage(header, len(payload))
		require.NoError(t, err)
		require.NoError(t, got.parseKeys(payload))
		require.Equal(t, m, got)
	}
	named := ticket{hold: 9, address: "host:1"}
	got, err := parseTicket(named.encode())
	require.NoError(t, err)
	require.Equal(t, named, got)
}

func FuzzMessage(f *testing.F) {
	for _, m := range []*message{{kind: kindWant}, {kind: kindBlock, key: connector.StoreKey{1}}, {kind: kindGone}, {kind: kindFetched, hold: 1 << 60}, {kind: 9}} {
		header, _ := m.encode()
		f.Add(header, 64)
	}
	f.Add([]byte{}, -1)
	f.Add([]byte{1, 2}, 1<<30)
	f.Fuzz(func(t *testing.T, header []byte, size int) {
		if size < 0 {
			return
		}
		m, err := parseMessage(header, size)
		if err != nil {
			require.ErrorIs(t, err, connector.ErrIncompatible)
		} else {
			again, _ := m.encode()
			require.Equal(t, header, again)
		}
		if ticket, err := parseTicket(header); err == nil {
			require.Equal(t, header, ticket.encode())
		}
	})
}

func TestPushedIsForgotten(t *testing.T) {
	p := newPushing()
	for i := range 3 * maxPushing {
		p.add(connector.RequestID(time.Duration(i).String()), []connector.StoreKey{{1}})
	}
	require.LessOrEqual(t, len(p.sent.entries), maxPushing)
	require.Equal(t, []connector.StoreKey{{2}}, p.add("r", []connector.StoreKey{{2}}))
	require.Equal(t, []connector.StoreKey{{3}}, p.add("r", []connector.StoreKey{{2}, {3}}))
	p.end("r")
	require.Len(t, p.add("r", []connector.StoreKey{{2}, {3}}), 2)
	c := newComing()
	for i := range 2 * maxComing {
		c.whole(ticket{hold: connector.HoldID(i)})
	}
	require.LessOrEqual(t, len(c.holds.entries), maxComing)
	require.False(t, c.waits(ticket{hold: 2*maxComing - 1}, time.Hour))
	require.True(t, c.waits(ticket{hold: 1}, time.Hour))
	require.False(t, c.waits(ticket{hold: 1}, 0))
}

func FuzzParts(f *testing.F) {
	f.Add(appendParts([]part{{total: 8, offset: 4, size: 4}, {key: connector.StoreKey{1}, total: 9, size: 1}}), 5)
	f.Fuzz(func(t *testing.T, header []byte, size int) {
		m, err := parseMessage(header, size)
		if err != nil || m.kind != kindParts {
			return
		}
		sum := 0
		for _, p := range m.parts {
			require.LessOrEqual(t, uint64(p.offset)+uint64(p.size), uint64(p.total))
			sum += int(p.size)
		}
		require.Equal(t, size, sum)
		require.True(t, bytes.Equal(header, appendParts(m.parts)))
	})
}

// noPipe can only be closed.
type noPipe struct{ pipe.Pipe }

func (noPipe) Close() error { return nil }

// Consumers that were active recently are not dropped for a new one.
func TestWhoGoesFirst(t *testing.T) {
	s := newStore(pipe.Peers{}, nil, nil)
	defer func() { require.NoError(t, s.Close()) }()
	link := func() *consumerLink { return &consumerLink{Link: pipe.Link{Out: noPipe{}, In: noPipe{}}} }
	var all []*consumerLink
	for range maxLinks {
		c := link()
		require.True(t, s.enter(c))
		s.hear(c, false)
		all = append(all, c)
	}
	require.False(t, s.enter(link()))
	all[3].heard = all[3].heard.Add(-2 * silentFor)
	all[4].heard, all[4].busy = all[4].heard.Add(-3*silentFor), true
	mute := link()
	require.True(t, s.enter(mute))
	require.NotContains(t, s.links, all[3])
	require.True(t, s.enter(link()), "who never said anything goes at once")
	require.NotContains(t, s.links, mute)
	require.Contains(t, s.links, all[4])
}

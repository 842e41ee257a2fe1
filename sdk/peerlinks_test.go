package sdk

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/pipe"
)

// More silent links than a producer serves at a time keep no consumer out: the oldest of them end.
func TestSilentLinksKeepNobodyOut(t *testing.T) {
	w := &wires{}
	p := w.engine(t, "p", connector.RoleProducer, pipe.Peers{})
	ticket := p.save(1, 2)
	var silent []pipe.Link
	for range 300 {
		l, err := w.Dial(t.Context(), "wire-0")
		require.NoError(t, err)
		silent = append(silent, l)
	}
	d := w.engine(t, "d", connector.RoleConsumer, pipe.Peers{})
	require.Equal(t, 2, d.settled(ticket, 1, 2))
	d.load(ticket, 1, 2)

	ended := 0
	for _, l := range silent {
		select {
		case <-l.In.(*strand).closed:
			ended++
		default:
		}
	}
	require.GreaterOrEqual(t, ended, len(silent)-maxLinks)
	require.Equal(t, 2, d.settled(ticket, 1, 2), "who says something stays")
}

// Consumers that were active recently are not dropped for a new one.
func TestWhoGoesFirst(t *testing.T) {
	s := newPeerStore(pipe.Peers{}, nil, nil)
	defer func() { require.NoError(t, s.Close()) }()
	link := func() *consumerLink { return &consumerLink{Link: pipe.Link{Out: newStrand(), In: newStrand()}} }
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

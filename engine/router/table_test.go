package router

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestPickGoesRound(t *testing.T) {
	c := NewChoice(2, 2)
	var got []int
	for range 3 {
		for _, r := range []role{prefill, decode} {
			i, ok := c.pick(r, nil)
			require.True(t, ok)
			got = append(got, i)
		}
	}
	require.Equal(t, []int{0, 2, 1, 3, 0, 2}, got)
}

func TestPickPrefersUpThenSuspect(t *testing.T) {
	c := NewChoice(2, 2)
	c.Failed(2)
	for range 3 {
		i, ok := c.pick(decode, nil)
		require.True(t, ok)
		require.Equal(t, 3, i, "the one that is up")
	}
	i, ok := c.pick(decode, map[int]bool{3: true})
	require.True(t, ok)
	require.Equal(t, 2, i, "a suspect is better than none")
	_, ok = c.pick(decode, map[int]bool{2: true, 3: true})
	require.False(t, ok)
}

func TestProbes(t *testing.T) {
	tests := []struct {
		probes []probe
		want   state
	}{
		{nil, up},
		{[]probe{refused}, down},
		{[]probe{leaving}, draining},
		{[]probe{failing}, down},
		{[]probe{failing, healthy}, up},
		{[]probe{starting}, loading},
		{[]probe{starting, healthy}, up},
		{[]probe{silent, silent}, up},
		{[]probe{silent, silent, silent}, down},
		{[]probe{silent, silent, healthy, silent, silent}, up},
		{[]probe{refused, healthy}, up},
		{[]probe{leaving, silent, silent, silent}, down},
		{[]probe{leaving, healthy}, up},
	}
	for _, tt := range tests {
		t.Run(fmt.Sprintf("%v", tt.probes), func(t *testing.T) {
			c := NewChoice(0, 1)
			tb := &c.table
			for _, p := range tt.probes {
				before := tb.instances[0].state
				require.Equal(t, tb.probed(0, p), tb.instances[0].state != before)
			}
			require.Equal(t, tt.want, tb.instances[0].state)
			_, ok := c.pick(decode, nil)
			require.Equal(t, tt.want <= suspect, ok)
		})
	}
}

func TestSuspectRecoversByProbe(t *testing.T) {
	tb := &table{instances: []instance{{role: decode}}}
	tb.failed(0)
	require.Equal(t, suspect, tb.instances[0].state)
	require.True(t, tb.probed(0, healthy))
	require.Equal(t, up, tb.instances[0].state)
	tb.probed(0, refused)
	tb.failed(0)
	require.Equal(t, down, tb.instances[0].state, "a failed request does not make a dead instance better")
}

// Whatever happens: pick gives an instance of the role, untried and usable, exactly if there is one,
// and one that is up if there is one.
func TestPickProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := newChoice(rapid.SliceOfN(rapid.SampledFrom([]role{prefill, decode}), 1, 6).Draw(t, "roles"))
		tb := &c.table
		index := rapid.IntRange(0, len(tb.instances)-1)
		for range rapid.IntRange(1, 40).Draw(t, "events") {
			switch rapid.IntRange(0, 2).Draw(t, "event") {
			case 0:
				tb.failed(index.Draw(t, "failed"))
			case 1:
				tb.probed(index.Draw(t, "probed"), probe(rapid.IntRange(0, 5).Draw(t, "probe")))
			}
			r := role(rapid.IntRange(0, 1).Draw(t, "pick"))
			tried := rapid.MapOf(index, rapid.Just(true)).Draw(t, "tried")
			best, free := down, 0
			for i, in := range tb.instances {
				if in.role == r && !tried[i] && in.state <= suspect {
					best, free = min(best, in.state), free+1
				}
			}
			i, ok := c.pick(r, tried)
			if ok != (free > 0) {
				t.Fatalf("pick says %v with %d usable", ok, free)
			}
			if ok && (tb.instances[i].role != r || tried[i] || tb.instances[i].state != best) {
				t.Fatalf("picked %d of %+v, tried %v", i, tb.instances, tried)
			}
		}
	})
}

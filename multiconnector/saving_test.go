package multiconnector_test

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/multiconnector"
)

// slowHand is a worker side whose Save takes a time.
type slowHand struct {
	connector.Worker
	takes time.Duration
	err   error
}

func (h *slowHand) Save(context.Context, *connector.Transfer, *connector.KV) error {
	<-time.After(h.takes)
	return h.err
}

func (h *slowHand) Close() error { return nil }

// A ticket waits for what it promises and, for their patience, for the other children; for one that is late
// already it does not wait at all.
func TestSaveTelling(t *testing.T) {
	const patience, hour = 100 * time.Millisecond, time.Hour
	holder := connector.Info{Groups: true, Scope: connector.ScopeEngine, Capabilities: connector.CanHold}
	store := connector.Info{Groups: true, Scope: connector.ScopeShared}
	own := connector.Info{Groups: true, Scope: connector.ScopeEngine}
	for name, c := range map[string]struct {
		infos []connector.Info
		takes []time.Duration
		errs  []error
		told  []time.Duration // after the start of each of two saves, a second apart; -1: it is not
	}{
		"all at once":              {[]connector.Info{holder, store}, []time.Duration{0, 0}, nil, []time.Duration{-1, -1}},
		"a healthy sibling":        {[]connector.Info{holder, store}, []time.Duration{0, patience / 2}, nil, []time.Duration{-1, -1}},
		"a slow store":             {[]connector.Info{holder, store}, []time.Duration{0, hour}, nil, []time.Duration{patience, 0}},
		"a slow holder":            {[]connector.Info{store, holder}, []time.Duration{0, hour}, nil, []time.Duration{-1, -1}},
		"two stores, one is slow":  {[]connector.Info{store, store}, []time.Duration{hour, time.Millisecond}, nil, []time.Duration{patience + time.Millisecond, time.Millisecond}},
		"a store that all can see": {[]connector.Info{own, store}, []time.Duration{0, hour}, nil, []time.Duration{-1, -1}},
		"a holder that fails":      {[]connector.Info{holder, store}, []time.Duration{0, hour}, []error{connector.ErrGone, nil}, []time.Duration{-1, -1}},
		"a store that fails":       {[]connector.Info{store, store}, []time.Duration{0, hour}, []error{connector.ErrGone, nil}, []time.Duration{-1, -1}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				children, sides := make([]multiconnector.Child, 2), make([]connector.Worker, 2)
				for i := range children {
					children[i] = multiconnector.Child{Name: string(rune('a' + i)), Role: connector.RoleBoth, Info: c.infos[i], Patience: patience}
					h := &slowHand{takes: c.takes[i]}
					if c.errs != nil {
						h.err = c.errs[i]
					}
					sides[i] = h
				}
				m, err := multiconnector.New("Multi", children)
				require.NoError(t, err)
				w, ok := m.Worker(sides, groups(), nil).(interface {
					SaveTelling(ctx context.Context, t *connector.Transfer, kv *connector.KV, promised func()) error
				})
				require.True(t, ok)
				told, over := []time.Duration{-1, -1}, make(chan error, 2)
				calls := make([]int, len(told))
				var mu sync.Mutex // told may be called by a timer
				for n := range told {
					began := time.Now()
					go func() {
						blocks := []connector.Block{{ID: connector.BlockID(n), Key: connector.BlockKey{byte(n + 1)}}}
						over <- w.SaveTelling(t.Context(), &connector.Transfer{Tokens: blockTokens, Blocks: blocks}, nil, func() {
							mu.Lock()
							defer mu.Unlock()
							told[n] = time.Since(began)
							calls[n]++
						})
					}()
					<-time.After(time.Second)
				}
				for range told {
					<-over
				}
				mu.Lock()
				defer mu.Unlock()
				require.Equal(t, c.told, told)
				require.LessOrEqual(t, max(calls[0], calls[1]), 1, "once")
			})
		})
	}
}

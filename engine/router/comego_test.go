package router

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/engine/router/policy"
)

// Prefill and decode instances come, are drained and leave under each policy while requests run, in one group and in several: none
// fails, and in the end nothing is left of those that are gone.
func TestPairsComeAndGo(t *testing.T) {
	const instances, clients, rounds = 4, 4, 40
	byRole := map[role][]*instanceServer{}
	for i := range instances {
		byRole[prefill] = append(byRole[prefill], serveInstance(t, ticket(fmt.Sprint("of ", i))))
		byRole[decode] = append(byRole[decode], serveInstance(t, tokens))
	}
	stable := serveInstance(t, tokens)
	for n, name := range policy.Names() {
		t.Run(name, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(14, uint64(n)))
			f := serveRouter(t, Config{Decode: []string{stable.URL}, File: File{
				Path: "-", Read: func(string) ([]byte, error) { return nil, nil }, Decode: func([]byte) (*Settings, error) { return &Settings{}, nil },
			}, Policy: name})
			stop := running(t, f.router)
			served, over := make(chan struct{}), make(chan struct{})
			var tasks sync.WaitGroup
			finish := sync.OnceFunc(func() {
				close(over)
				tasks.Wait()
			})
			defer finish()
			for i := range clients {
				tasks.Go(func() {
					for n := 0; ; n++ {
						body := strings.Replace(doc, `"hi"`, fmt.Sprintf(`"%s %d %d"`, strings.Repeat("a conversation ", 80), i, n%9), 1)
						resp, err := http.Post(f.URL+"/v1/completions", "application/json", strings.NewReader(body))
						if assert.NoError(t, err) {
							text, err := io.ReadAll(resp.Body)
							resp.Body.Close()
							assert.NoError(t, err)
							assert.Equal(t, "200 data: {\"n\":1}\n\ndata: [DONE]\n\n", fmt.Sprint(resp.StatusCode, " ", string(text)))
						}
						select {
						case served <- struct{}{}:
						case <-over:
							return
						}
					}
				})
			}
			for range rounds {
				require.NoError(t, f.router.SetInstances(some(rng, byRole)))
				for range clients {
					<-served
				}
			}
			require.NoError(t, f.router.SetInstances(nil))
			finish()
			require.Positive(t, f.outcomes(t, disaggregated))
			require.Positive(t, f.outcomes(t, plain))
			for _, o := range []outcome{clientError, upstreamError, unavailable, overloaded, broken, aborted} {
				require.Zero(t, f.outcomes(t, o), o)
			}
			require.Eventually(t, func() bool {
				f.router.pool.mu.Lock()
				defer f.router.pool.mu.Unlock()
				return len(f.router.pool.places) == 1
			}, waitLimit, waitTick)
			stop()
		})
	}
}

// some are a part of the instances, some of them drained, in two groups.
func some(rng *rand.Rand, byRole map[role][]*instanceServer) (list []Instance) {
	for r, servers := range byRole {
		for _, s := range servers {
			if what := rng.IntN(3); what > 0 {
				list = append(list, Instance{URL: s.URL, Role: r.String(), Drain: what == 2, Group: []string{"", "a"}[rng.IntN(2)]})
			}
		}
	}
	return list
}

package router

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/engine/router/policy"
)

type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func status(code int) (*http.Response, error) {
	return &http.Response{StatusCode: code, Body: io.NopCloser(strings.NewReader("{}"))}, nil
}

// probed takes the result of a health check.
func (p *pool) probed(i int, result probe) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.probedLocked(i, result, "")
}

// saw takes the fit that an instance's /health reports.
func (p *pool) saw(i int, f *fit) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.sawLocked(i, f)
}

func TestWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		answers := []func(*http.Request) (*http.Response, error){
			func(*http.Request) (*http.Response, error) { return status(200) },
			func(*http.Request) (*http.Response, error) { return status(503) },
			func(*http.Request) (*http.Response, error) { return status(500) },
			func(*http.Request) (*http.Response, error) { return nil, syscall.ECONNREFUSED },
			func(*http.Request) (*http.Response, error) { return nil, errors.New("reset") },
			func(r *http.Request) (*http.Response, error) { // hangs until the probe's deadline
				<-r.Context().Done()
				return nil, r.Context().Err()
			},
		}
		var at []time.Duration
		var got []probe
		start := time.Now()
		ctx, cancel := context.WithCancel(t.Context())
		c := checker{interval: time.Second, timeout: 3 * time.Second, client: &http.Client{Transport: roundTrip(func(r *http.Request) (*http.Response, error) {
			require.Equal(t, "/base/health", r.URL.Path)
			at = append(at, time.Since(start))
			return answers[len(at)-1](r)
		})}}
		u, err := url.Parse("http://x/base")
		require.NoError(t, err)
		c.watch(ctx, u, func(c checked) {
			if got = append(got, c.result); len(got) == len(answers) {
				cancel()
			}
		})
		require.Equal(t, []probe{healthy, failing, silent, refused, silent, silent}, got)
		require.Zero(t, at[0])
		for i := 1; i < len(at); i++ {
			gap := at[i] - at[i-1]
			require.True(t, gap >= 800*time.Millisecond && gap <= 1200*time.Millisecond, "probe %d came after %v", i, gap)
		}
		require.Equal(t, 3*time.Second, time.Since(start)-at[5], "a hanging probe ends at its timeout")
	})
}

// Three silent probes end the life of what runs on an instance, and a good one begins a new life.
func TestLostInstance(t *testing.T) {
	m, err := newMetrics(nil)
	require.NoError(t, err)
	u, err := url.Parse("http://x")
	require.NoError(t, err)
	chooser, err := policy.New(policy.Config{})
	require.NoError(t, err)
	p := newPool([]spec{{role: decode, url: u}}, chooser, slog.New(slog.DiscardHandler), m)
	pick := func() (target, bool) {
		at, ok := p.choose(&policy.Request{}, map[int]bool{}, policy.None)
		return at.decode, ok
	}
	first, ok := pick()
	require.True(t, ok)
	tied := tie(t.Context(), first.life)
	defer tied.release()
	ctx := tied.ctx
	p.probed(0, leaving)
	p.probed(0, refused)
	require.NoError(t, ctx.Err(), "a draining instance finishes what it has, also when it listens no longer")
	p.probed(0, leaving)
	p.probed(0, silent)
	p.probed(0, silent)
	require.NoError(t, ctx.Err())
	p.probed(0, silent)
	<-ctx.Done()
	require.ErrorIs(t, context.Cause(ctx), errLost)
	_, ok = pick()
	require.False(t, ok)
	p.probed(0, healthy)
	second, ok := pick()
	require.True(t, ok)
	require.NoError(t, second.life.Err())
	p.close()
	require.Error(t, second.life.Err())
}

// An instance that hangs and refuses connections after that has lost what it held, as one that only refuses them.
func TestRestartedInstanceIsForgotten(t *testing.T) {
	for name, probes := range map[string][]probe{
		"refuses": {refused}, "hangs first": {silent, silent, silent, refused}, "and again": {refused, silent, refused},
	} {
		p := newTestPool(t)
		require.NoError(t, p.set(byFlag, []spec{{role: decode, url: at(t, "http://a")}}))
		r := &policy.Request{Alone: true, Tokens: 1000, Prompt: policy.NewPrompt(1, nil, []byte(strings.Repeat("long ", 800)))}
		held := func() int {
			to, ok := p.choose(r, map[int]bool{}, policy.None)
			require.True(t, ok)
			p.answered(to.decode, nil, true)
			p.done(to.decode)
			p.leave([]int{to.decode.index})
			return to.decode.leg.Hit.Tokens()
		}
		require.Zero(t, held())
		require.Positive(t, held())
		p.probed(0, silent)
		p.probed(0, healthy)
		require.Positive(t, held(), "one silent probe says nothing")
		for _, one := range probes {
			p.probed(0, one)
		}
		p.probed(0, healthy)
		require.Zero(t, held(), name)
		p.close()
	}
}

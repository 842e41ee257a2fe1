package main

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/acceptance/rig"
	"github.com/kvport/kvport/verify/cluster"
	"github.com/kvport/kvport/verify/fixture"
	"github.com/kvport/kvport/verify/testkit"
)

var jsonBlock = regexp.MustCompile("(?s)```json\n(.*?)```")

// TestMultiPage: an engine starts with every config of docs/multiconnector.md, and its tokens are those of a
// single node, cold and warm.
func TestMultiPage(t *testing.T) {
	r := rig.New(t)
	page, err := os.ReadFile(filepath.Join(testkit.Root(t), "docs", "multiconnector.md"))
	require.NoError(t, err)
	configs := jsonBlock.FindAllStringSubmatch(string(page), -1)
	require.Len(t, configs, 3)
	prompts := rig.Texts(t, *rig.Seed+57000, 4, 300, 900)
	node := r.ServeModel("sim", "single", "")
	want := r.All(node.URL, prompts, 2)
	r.Stop(node)
	for i, c := range configs {
		config := strings.ReplaceAll(c[1], "/var/lib/kvport", filepath.Join(t.TempDir(), fmt.Sprint(i)))
		engine := r.ServeModel("sim", fmt.Sprintf("config %d", i), config, "--enable-prefix-caching=false")
		rig.Same(t, fmt.Sprintf("config %d, cold", i), want, r.All(engine.URL, prompts, 2))
		r.Idle(engine)
		rig.Same(t, fmt.Sprintf("config %d, warm", i), want, r.All(engine.URL, prompts, 2))
		childrenReady(r, engine)
		m := r.Metrics(engine)
		require.Positive(t, m.Sum("kvport_prompt_tokens_total", `source="external"`))
		require.Zero(t, m.Sum("kvport_child_failed_blocks_total"))
		r.Stop(engine)
	}
}

// TestMultiPlugin: the same composite as a plugin. Its children are killed at random, then the plugin
// itself: tokens are right, and no process is left.
func TestMultiPlugin(t *testing.T) {
	kills := rig.Count(t, "multikills", *flagMultiKills, 5, 50)
	r := rig.New(t)
	multi := composed{
		children: children(t, "plugin"), values: fixture.Values{"TMP": r.Store},
		settings: fmt.Sprintf(`,"kv_connector_module_path":%q,"kvport":{"breaker":{"deaths":1000,"backoff_max":"20ms"}}`, filepath.Join(testkit.Root(t), "bin", "kvport-multi")),
	}
	prompts := rig.Texts(t, *rig.Seed+58000, 6+kills, 400, 2000)
	node := r.ServeModel("sim", "single", "")
	want := r.All(node.URL, prompts, 4)
	r.Stop(node)
	engine := r.ServeModel("sim", "engine", multi.config(t, "kv_both", ""), "--enable-prefix-caching=false")
	rng := rand.New(rand.NewPCG(*rig.Seed, 11))
	tokens := rig.Compare(t, "cold", want[:6], r.All(engine.URL, prompts[:6], 4))
	var family []int
	for i := range kills + 1 {
		require.Eventually(t, func() bool {
			plugins := cluster.Plugins(engine.PID())
			if len(plugins) != 1 {
				return false
			}
			family = append(plugins, cluster.Plugins(plugins[0])...)
			return len(family) == 3
		}, time.Minute, 5*time.Millisecond, "a plugin and its two children") // one that is killed as it starts may be left alone for half of it
		victim := family[1+rng.IntN(2)]
		if i == kills {
			victim = family[0]
		}
		delay := time.NewTimer(time.Duration(rng.IntN(60)) * time.Millisecond)
		struck := make(chan error, 1)
		go func() {
			<-delay.C
			struck <- syscall.Kill(victim, syscall.SIGKILL)
		}()
		at := rng.IntN(i + 1)
		tokens += rig.Compare(t, fmt.Sprintf("kill %d", i), want[at:at+6], r.All(engine.URL, prompts[at:at+6], 4))
		require.NoError(t, <-struck)
		require.Eventually(t, func() bool { return !cluster.Alive(victim) }, time.Minute, time.Millisecond)
	}
	for _, pid := range family {
		require.Eventually(t, func() bool { return !cluster.Alive(pid) }, time.Minute, time.Millisecond, "child %d outlives its plugin", pid)
	}
	require.Eventually(t, func() bool { return r.Metrics(engine).Sum("kvport_plugin_restarts_total") > 0 }, time.Minute, 5*time.Millisecond)
	r.Plugin(engine)
	r.Idle(engine)
	m := r.Metrics(engine)
	require.Positive(t, m.Sum("kvport_prompt_tokens_total", `source="external"`))
	require.Zero(t, m.Sum("kvport_integrity_failures_total"))
	t.Logf("%d kills of children and 1 of the plugin; %d tokens compared, 0 differ; %.0f plugin restarts", kills, tokens, m.Sum("kvport_plugin_restarts_total"))
}

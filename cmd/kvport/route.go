package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/spf13/cobra"

	"github.com/kvport/kvport/engine/router"
)

type routeFlags struct {
	listenFlags
	prefill, decode []string
	mode, policy    string
	logLevel        string
}

func newRoute() *cobra.Command {
	f := &routeFlags{}
	cmd := &cobra.Command{
		Use:   "route --decode URL,... [--prefill URL,...]",
		Short: "Spread requests over prefill and decode instances",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return f.run(cmd) },
	}
	flags := cmd.Flags()
	flags.StringSliceVar(&f.prefill, "prefill", nil, "base URLs of prefill instances; without one, decode instances serve alone")
	flags.StringSliceVar(&f.decode, "decode", nil, "base URLs of decode instances")
	flags.StringVar(&f.mode, "mode", "pool", "pool: any prefill instance goes with any decode instance")
	flags.StringVar(&f.policy, "policy", "round_robin", "how an instance is chosen: round_robin")
	f.add(cmd, 8080)
	addLogLevel(cmd, &f.logLevel)
	return cmd
}

func (f *routeFlags) run(cmd *cobra.Command) error {
	switch {
	case f.mode == "replica":
		return errors.New("--mode replica is not built yet, only pool")
	case f.mode != "pool":
		return fmt.Errorf("--mode is %q, want pool", f.mode)
	case f.policy != "round_robin":
		return fmt.Errorf("--policy is %q, want round_robin", f.policy)
	case len(f.decode) == 0:
		return errors.New("--decode is required: the base URL of at least one decode instance")
	}
	if err := setLog(cmd.ErrOrStderr(), f.logLevel); err != nil {
		return err
	}
	registry := newRegistry()
	r, err := router.New(router.Config{
		Prefill: f.prefill, Decode: f.decode, Log: slog.Default(), Metrics: registry, Gatherer: registry,
		OwnKeys: f.apiKeyFile != "",
	})
	if err != nil {
		return err
	}
	defer r.Close()
	l, keys, err := f.listen()
	if err != nil {
		return err
	}
	probing, stop := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { r.Run(probing) })
	_, err = serveHTTP(cmd.Context(), cmd, l, r, keys)
	stop()
	wg.Wait()
	return fail(err)
}

// newRegistry is a metrics registry with the process's own.
func newRegistry() *prometheus.Registry {
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return registry
}

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/spf13/cobra"

	"github.com/kvport/kvport/engine/router"
	"github.com/kvport/kvport/internal/ticket"
)

type routeFlags struct {
	listenFlags
	prefill, decode []string
	mode, policy    string
	turns           int
	logLevel        string
	register        string
	keyFile         string
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
	flags.StringVar(&f.register, "register", "", "HOST:PORT at which instances register by themselves; port 0 takes a free one, which is logged")
	flags.StringVar(&f.keyFile, "ticket-key-file", "", "with --register: the key that the engines share; default: that of one user on one host")
	flags.IntVar(&f.turns, "bidirectional", 0, "remember so many conversations: prefill instances load from the decode instance that gave the last answer; all kv_both")
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
	case f.turns < 0:
		return fmt.Errorf("--bidirectional is %d, want a number of conversations", f.turns)
	case len(f.decode) == 0 && f.register == "":
		return errors.New("--decode is required: the base URL of at least one decode instance, or --register")
	case f.keyFile != "" && f.register == "":
		return errors.New("--ticket-key-file is for --register")
	}
	if err := setLog(cmd.ErrOrStderr(), f.logLevel); err != nil {
		return err
	}
	registering, err := f.registration()
	if err != nil {
		return err
	}
	registry := newRegistry()
	r, err := router.New(router.Config{
		Register: registering,
		Prefill:  f.prefill, Decode: f.decode, Log: slog.Default(), Metrics: registry, Gatherer: registry,
		OwnKeys: f.apiKeyFile != "", Turns: f.turns,
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
	if err := f.serveRegistrar(probing, &wg, r); err != nil {
		stop()
		return errors.Join(err, l.Close())
	}
	wg.Go(func() { r.Run(probing) })
	_, err = serveHTTP(cmd.Context(), cmd, l, r, keys)
	stop()
	wg.Wait()
	return fail(err)
}

// registration is how the router deals with instances that register; none without --register.
func (f *routeFlags) registration() (router.Registration, error) {
	if f.register == "" {
		return router.Registration{}, nil
	}
	key, err := f.key()
	if err != nil {
		return router.Registration{}, err
	}
	return router.Registration{
		Verify: func(body, signature string) bool { return ticket.VerifyText(key, ticket.RegisterText, body, signature) },
		Sign:   func(text string) string { return ticket.SignText(key, ticket.RequestIDText, text) },
	}, nil
}

func (f *routeFlags) key() ([]byte, error) {
	if f.keyFile == "" {
		return ticket.SharedKey()
	}
	return ticket.LoadKey(f.keyFile)
}

// serveRegistrar takes registrations until ctx ends.
func (f *routeFlags) serveRegistrar(ctx context.Context, wg *sync.WaitGroup, r *router.Router) error {
	if f.register == "" {
		return nil
	}
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", f.register)
	if err != nil {
		return fmt.Errorf("--register: %w", err)
	}
	slog.Info("instances can register", "address", l.Addr().String())
	server := &http.Server{Handler: r.Registrar(), ReadTimeout: 5 * time.Second, WriteTimeout: 5 * time.Second, IdleTimeout: time.Minute, MaxHeaderBytes: 16 << 10}
	wg.Go(func() { _ = server.Serve(l) }) // it ends with Close
	wg.Go(func() {
		<-ctx.Done()
		_ = server.Close()
	})
	return nil
}

// newRegistry is a metrics registry with the process's own.
func newRegistry() *prometheus.Registry {
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return registry
}

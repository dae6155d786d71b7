-- Queue or schedule a failed job again, as RQ does for a job with retries left, if this execution still holds it.
-- when: as put_back takes it. counter: the field that counts tries. tries: its new value. ttl: seconds for which
-- results are kept; '' leaves their time to live alone. at_front: whether the job goes to the front, now or when due.
-- Returns as finish.lua does. The job has not ended, so its dependents go on waiting.
local reply = not_held()
if reply then return reply end

write_run(args.counter, args.tries)
if args.at_front then call('HSET', job, 'enqueue_at_front_on_retry', 1) end
if #ARGV > 1 then
  add_result()
  expire_results(args.ttl)
end
put_back(args.when)
leave_slot(args.when)
count('failed_job_count')
let_go(queue, id, eid, worker)
return 'done'
